"""Functions that this extension adds to `import trappm`, by the module that defines each."""

FUNCTIONS = {
    "advise": "trappm.extensions.advice.advising",
    "check": "trappm.extensions.advice.guard",
}
