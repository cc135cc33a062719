"""Plug-ins for engines that have model code of their own. Nothing in moepack imports them: an engine finds them."""
