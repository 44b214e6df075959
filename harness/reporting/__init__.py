"""From records to pages: the parts of `report` and `compare`. Imports no torch."""
