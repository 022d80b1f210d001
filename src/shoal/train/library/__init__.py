"""The library interface: the user's own training loop, around any module, in any layout."""
