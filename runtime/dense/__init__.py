"""The linear maps of a served model outside its experts: the choice of their versions, and their products."""
