"""The library face: a training loop of the user's own, around any module, in any layout."""
