"""Tool calls: the forms in which models write them, read from answers as these arrive and written as grammars."""
