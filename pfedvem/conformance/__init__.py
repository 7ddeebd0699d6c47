"""The suite that methods must pass.

``test_method.py`` holds what every method must do: ours, and yours by

    pytest --pyargs pfedvem.conformance --method mypackage.mymodule:MyMethod

The other files hold our methods to their maths: closed forms, identities between methods, and plain PyTorch programs
that do the same. ``quadratic.py`` is there for closed forms of yours.
"""
