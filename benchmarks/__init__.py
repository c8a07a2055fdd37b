"""Studies that answer the questions of published papers: `python -m benchmarks NAME`, from the repository.

They are not installed. A further study is a folder here, and a line in `benchmarks.__main__`.
"""
