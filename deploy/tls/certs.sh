#!/bin/sh
# certs.sh DIR [NAME...]: an authority, and a certificate that all services of one cluster can show.
#
# Writes ca.pem ca-key.pem cert.pem key.pem tokens into DIR; nothing that is there is overwritten. The certificate
# carries the DNS name "weir", by which services know each other (security.server_name), and each NAME: the names or
# IP addresses under which clients reach the router. With GROUP set, that group may read key and tokens. Keep
# ca-key.pem away from the machines that serve.
set -eu

[ $# -ge 1 ] || { echo "usage: certs.sh DIR [NAME...]" >&2; exit 2; }
dir=$1
shift
mkdir -p "$dir"
umask 077

for file in ca.pem ca-key.pem cert.pem key.pem tokens; do
    [ ! -e "$dir/$file" ] || { echo "$dir/$file is there already" >&2; exit 2; }
done

names=DNS:weir
for name in "$@"; do
    case $name in
        *[!0-9.:a-fA-F]*) names="$names,DNS:$name" ;;
        *.*.*.* | *:*) names="$names,IP:$name" ;;
        *) names="$names,DNS:$name" ;;
    esac
done

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=weir authority" \
    -keyout "$dir/ca-key.pem" -out "$dir/ca.pem" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=weir" \
    -keyout "$dir/key.pem" -out "$dir/request.pem" 2>/dev/null
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" >"$dir/extensions"
openssl x509 -req -in "$dir/request.pem" -CA "$dir/ca.pem" -CAkey "$dir/ca-key.pem" -CAcreateserial -days 825 \
    -extfile "$dir/extensions" -out "$dir/cert.pem" 2>/dev/null
rm -f "$dir/request.pem" "$dir/extensions" "$dir/ca.srl"
printf 'operator %s\n' "$(openssl rand -hex 24)" >"$dir/tokens"
chmod 644 "$dir/ca.pem" "$dir/cert.pem"
if [ -n "${GROUP:-}" ]; then
    chgrp "$GROUP" "$dir/key.pem" "$dir/tokens"
    chmod 640 "$dir/key.pem" "$dir/tokens"
    chmod 755 "$dir"
fi
echo "wrote ca.pem ca-key.pem cert.pem key.pem tokens ($names) to $dir"
