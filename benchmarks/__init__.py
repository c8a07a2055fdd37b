"""Studies that answer the questions of published papers: `python -m benchmarks NAME`, from the repository.

They are not installed: what measures a user's own machines is `ensemble bench` (`ensemble.bench`), whose launcher,
tables and charts they use. A further study is a folder here, and a line in `benchmarks.__main__`.
"""
