"""Remote tiers: places outside this host that keep whole records. The contract is contract.py; one file an engine."""
