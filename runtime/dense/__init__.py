"""The linear maps of a served model outside its experts: which they are, and products by them."""
