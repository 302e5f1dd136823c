"""Completion in fish."""

from __future__ import annotations

from accel_cli.completion.tables import Dialect


def quote(text: str) -> str:
    """Quote a `str` for fish, where a backslash escapes quotes within quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


DIALECT = Dialect(
    head="function {name}\n    switch $argv[1]",
    case="        case {value}\n            {print}",
    foot="    end\nend",
    quote=quote,
    hints=True,
)

DRIVER = r"""
function _accelerate_spell
    if string match -q -- '--*' $argv[1]
        printf '%s' --(string replace -a -- - _ (string sub -s 3 -- $argv[1]))
    else
        printf '%s' $argv[1]
    end
end

function _accelerate_offer
    switch "$argv[1]"
        case :anything ''
        case :file
            __fish_complete_path (commandline -ct)
        case :folder
            __fish_complete_directories (commandline -ct)
        case '*'
            printf '%s\n' $argv
    end
end

function _accelerate
    set -l tokens (commandline -opc)
    set -l current (commandline -ct)
    set -l command (string replace -r '^.*/' '' -- $tokens[1] | string replace -r '^accelerate-?' '')
    set -l pending
    set -e tokens[1]
    for word in $tokens
        if set -q pending[1]
            set pending
        else if string match -q -- '--*=*' $word
            continue
        else if string match -q -- '-*' $word
            set pending (_accelerate_values "$command "(_accelerate_spell $word))
        else if contains -- $word (_accelerate_commands "$command" | string replace -r '\t.*' '')
            set command (string trim -- "$command $word")
        else if _accelerate_runs_another "$command" | string length -q
            __fish_complete_path $current
            return
        end
    end
    if set -q pending[1]
        _accelerate_offer $pending
    else if string match -q -- '--*=*' $current
        set -l flag (string replace -r '=.*' '' -- $current)
        for value in (_accelerate_offer (_accelerate_values "$command "(_accelerate_spell $flag)))
            printf '%s=%s\n' $flag $value
        end
    else if string match -q -- '-*' $current
        # a flag begun with hyphens is completed with hyphens
        if string match -q -- '--?*-*' $current
            for line in (_accelerate_flags "$command")
                set -l parts (string split -m 1 \t -- $line)
                printf '%s\t%s\n' (string replace -a -- _ - $parts[1]) "$parts[2]"
            end
        else
            _accelerate_flags "$command"
        end
    else if _accelerate_commands "$command" | string length -q
        _accelerate_commands "$command"
    else
        _accelerate_offer (_accelerate_argument "$command")
    end
end

for program in {programs}
    complete -c $program -f -a '(_accelerate)'
end
""".strip()
