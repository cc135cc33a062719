"""Recipes that come with moepack, as package data."""
