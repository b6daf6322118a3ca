"""Array code too slow for Python, compiled by numba; everything that needs numba is in here."""
