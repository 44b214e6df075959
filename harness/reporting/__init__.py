"""From records to pages: what `report` and `compare` are made of. Imports no torch."""
