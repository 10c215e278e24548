#!/bin/sh
found=0
[ "$(cat /app/hello.txt)" = hello ] && found=1
num_files=$(ls /app | wc -l)
echo "{\"reward\": $found, \"num_files\": $num_files}" > /logs/verifier/reward.json
