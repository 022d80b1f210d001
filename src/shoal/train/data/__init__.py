"""Data: tokenised once into memory-mapped files; samples and their order are pure functions.

The path of a token: ``sources`` (which files) → ``rows`` (their documents) → ``encode`` (their tokens, in worker
processes) → ``shards`` (one stream per split, on disk), all called by ``prepare``; then ``dataset`` (opens it) →
``samples`` (cuts it) → ``order`` (which sample when) → ``loader`` (tensors). Only ``loader`` imports torch, so worker
processes start fast.
"""
