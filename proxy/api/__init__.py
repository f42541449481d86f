"""HTTP surfaces, one module each. No decisions here."""
