"""Executes a load plan: reads bytes, casts them and puts them where they belong, in bounded memory."""
