"""The paper's tables and plots as runs: `pseudoloss experiments`.

catalogue.py lists the experiments, matching.py decides which runs belong to them (old_files.py
reads those of older versions), cells.py trains them, tables.py and plots.py show the results, and
commands.py is the command line.
"""
