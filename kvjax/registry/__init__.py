"""From a string to a method: registration, strings, and the loading of users' methods; no method is named here."""
