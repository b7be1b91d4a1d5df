"""One file for each released schema; what was released is never changed again."""
