"""Memory and wire bytes of a run, computed from a model's shapes before any machine is rented (``verl-logra plan``).

Pure Python: neither torch nor transformers is imported. ``models`` knows the shapes, ``memory`` holds the formulas,
``wire_bytes`` the weight sync's, ``plan`` puts them side by side, ``text`` and ``picture`` show them.
"""
