"""The HTML report of a run or an audit: one file that opens offline."""
