"""The training corpus: source code of published packages, cleaned, deduplicated and split.

`harvest` and `sources` download and store one file per project, so a harvest can be stopped and resumed;
`build` removes near-duplicates, splits by project and writes the shards and the manifest. Only permissively
licensed code is kept, and the licence is recorded with every file.
"""
