"""One suite that every method must pass: ours, and yours by

pytest --pyargs pfedvem.conformance --method mypackage.mymodule:MyMethod
"""
