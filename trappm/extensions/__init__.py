"""Extensions: features outside the mission; deleting the folder of one removes the feature.

The core finds them with `trappm.profiler.extensions`.
"""
