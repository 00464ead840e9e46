"""DSV4_LAYOUT=page-major in a server: page ids, what is registered and sent, what does not go with it."""
