"""Python source from published packages, made fit to learn from.

`harvest` alone talks to the package index and keeps one file per project, so it can stop and go on;
`build` alone decides what is trained on (near-duplicates, split by project) and writes the manifest.
Only permissively licensed projects are kept, and the licence is recorded with every file.
"""
