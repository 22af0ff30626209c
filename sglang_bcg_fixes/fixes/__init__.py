"""One file per defect: its stem is the id, the flag and the page follow from it. Copy `_template.py` to add one."""
