"""The paper's tables and figures as runs: `pseudoloss experiments`.

catalogue.py says what there is, cells.py trains it, tables.py and figures.py show it,
and commands.py is the way in.
"""
