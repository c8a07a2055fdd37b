"""The live page: the log of a run, projected into documents that a browser draws.

`projection` makes the documents from the events, `feed` follows a log and says what changed, `server` serves both;
`static/` holds the page. The report is the same page with its documents inside.
"""
