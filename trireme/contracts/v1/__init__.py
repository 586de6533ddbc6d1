"""Generated from `proto/trireme/v1` by `python -m trireme.contracts.generate`; not edited by hand."""
