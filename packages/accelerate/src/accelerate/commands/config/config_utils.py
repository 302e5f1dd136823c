"""The old path of what the questions share."""

from argparse import RawDescriptionHelpFormatter

from accel_cli.questionnaire.dynamo import DYNAMO_BACKENDS as DYNAMO_BACKENDS

SubcommandHelpFormatter = RawDescriptionHelpFormatter
