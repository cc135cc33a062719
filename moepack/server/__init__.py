"""`moepack serve`: the OpenAI interface, the scheduler behind it, and the page. Nothing imports it but the command."""
