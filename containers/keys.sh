#!/bin/sh
# Make the keys of a federation in FOLDER/authority, and give each part the files that it needs, and no others.
#   keys.sh FOLDER SERVER_HOST RELAY_HOST
set -eu
cd "$1"
if [ -e server/federation.json ]; then
    exit 0
fi
confide deploy keys make authority/above --clients 1 --host "$2"
confide deploy keys add authority/above relay --users 1,2
confide deploy keys make authority/below --clients 2 --host "$3" --first-user 1
mkdir -p server relay/below client-0 client-1 client-2
for name in ca.pem server.pem server.key; do
    cp "authority/above/$name" server/
    cp "authority/below/$name" relay/below/
done
cp authority/above/ca.pem relay/
cp authority/above/ca.pem client-0/
cp authority/below/ca.pem client-1/
cp authority/below/ca.pem client-2/
cp authority/above/relay relay/key
cp authority/above/client-0 client-0/key
cp authority/below/client-0 client-1/key
cp authority/below/client-1 client-2/key
cp authority/below/federation.json relay/below/
cp authority/above/federation.json server/
