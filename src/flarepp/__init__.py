"""flarepp: a reproduction of *FLARE++: low-rank attention with dynamic attention routing* (arXiv 2608.11519).

config.yaml expands into run specs (`spec`), each run spec becomes one record (`train`, `record`), and tables, figures and
the claims ledger (`paper`) are pure functions of records.
"""

__version__ = "0.1.0"
