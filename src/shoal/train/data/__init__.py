"""Data: tokenised once into memory-mapped files; samples and their order are pure functions.

The way of a token: ``sources`` (which files) → ``rows`` (their documents) → ``encode`` (their tokens, in
worker processes) → ``shards`` (one stream a split, on disk), all called by ``prepare``; then ``dataset``
(opens it) → ``samples`` (cuts it) → ``order`` (which sample when) → ``loader`` (tensors). Only ``loader``
imports torch, so that worker processes start fast.
"""
