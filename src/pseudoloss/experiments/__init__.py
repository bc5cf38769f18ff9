"""The paper's tables and plots as runs: `pseudoloss experiments`.

catalogue.py lists the experiments, matching.py decides which runs belong to them, cells.py trains
them, tables.py and plots.py show the results, and commands.py is the command line.
"""
