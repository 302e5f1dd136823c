"""Compatibility path for what the questions share."""

from argparse import RawDescriptionHelpFormatter

from accel_cli.questionnaire.precision import DYNAMO_BACKENDS as DYNAMO_BACKENDS

SubcommandHelpFormatter = RawDescriptionHelpFormatter
