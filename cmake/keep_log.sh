#!/bin/sh
# keep_log.sh COMMAND...: runs a compile command; what it prints to stderr also goes beside its object file, to <object>.log.
# build_backend/kernel_resources.py reads there what ptxas says about registers and spills.
object=
previous=
for argument in "$@"; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.log"
status=$?
cat "$object.log" >&2
exit $status
