# Exactly what orbit/verbs/_pyverbs.py uses of pyverbs 44.
