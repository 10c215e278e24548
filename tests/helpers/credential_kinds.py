"""Texts with made-up credentials, by the place and the shape that they have, and texts without any.

`KINDS` was written with the expressions of `rollout_io.redaction.credentials`; `LATER` after they were
final, without a look at them, so only these measure what redaction finds in new logs.
"""

import base64
import random
import re
import string

LETTERS, DIGITS, HEX = string.ascii_letters, string.digits, "0123456789abcdef"
ALNUM = LETTERS + DIGITS
CHARACTERS = {"a": ALNUM, "x": HEX, "d": DIGITS, "l": string.ascii_lowercase}
BASE64 = {"b": "bob:", "B": "A=1\nGITHUB_TOKEN=ghp_"}

# « and » enclose the secrets of a text. {a20} is 20 letters and digits, {x32} hexadecimal digits, {d10} digits, {l8} letters,
# {b20} and {B40} base64.
KINDS = {
    "env": "DB_HOST=x\nDB_PASSWORD=«{l6}&{d3}»\nDEBUG=1",
    "pgpassword": "PGPASSWORD=«{a14}» psql -h db",
    "secret_key": "SECRET_KEY=«{x64}»",
    "yaml": "db:\n  user: app\n  password: «correct-{l6}-{l4}»\n",
    "ini": "[db]\npasswd = «{a12}»\n",
    "toml": '[auth]\napi_key = "«{a32}»"\n',
    "properties": "spring.datasource.password=«{a12}»\n",
    "json": '{"user": "app", "password": "«{a10}»", "port": 5432}',
    "camel_case": '{"clientSecret": "«{a40}»", "accessKey": "«{a20}»"}',
    "xml": "<server><id>x</id><password>«{a12}»</password></server>",
    "appsettings": '<add key="ApiKey" value="«{a32}»" />',
    "kubernetes_env": "- name: DB_PASSWORD\n  value: «{a16}»\n",
    "aws_secret": "aws_secret_access_key = «{a20}/{a19}»\n",
    "aws_session": "AWS_SESSION_TOKEN=«IQoJb3JpZ2lu{a200}»",
    "azure_storage": "AccountName=x;AccountKey=«{a86}==»;EndpointSuffix=core.windows.net",
    "odbc": "Server=tcp:x,1433;Database=y;User ID=u;Password=«{a14}!»;Encrypt=True",
    "basic": "Authorization: Basic «{b20}»",
    "bearer": "authorization: bearer «{a40}»",
    "api_key_header": "curl -H 'x-api-key: «{x40}»' https://x.org",
    "private_token": "PRIVATE-TOKEN: «{a20}»",
    "cookie": "Cookie: theme=dark; sessionid=«{a32}»; lang=en",
    "set_cookie": "< Set-Cookie: sid=«{a26}»; Path=/; HttpOnly; Expires=Thu, 01 Jan 2026",
    "netrc": "machine api.x.org login bob password «{a12}»",
    "netrc_lines": "machine x.org\n  login bob\n  password «{a12}»\n",
    "docker": '{"auths": {"ghcr.io": {"auth": "«{b24}»"}}}',
    "npmrc": "//registry.npmjs.org/:_authToken=«{x36}»",
    "mysql": "mysql -u root -p«{a12}» -h db shop",
    "sshpass": "sshpass -p '«{a12}»' ssh root@10.0.0.1",
    "mc_alias": "mc alias set store https://s3.x.org {a20} «{a40}»",
    "mc_host": "mc config host add store https://s3.x.org {a20} «{l6}-{a9}» --api S3v4",
    "aws_configure": "aws configure set aws_secret_access_key «{a20}/{a19}» --profile x",
    "npm_config": "npm config set //npm.x.org/:_authToken «{x36}»",
    "rclone": "rclone config create store s3 provider Minio secret_access_key «{a32}» region x",
    "s3cmd": "s3cmd --access_key={a20} --secret_key=«{a40}» ls s3://x",
    "vault_login": "vault login -no-print «{a26}»",
    "here_string": "gh auth login --with-token <<< «{a40}»",
    "docker_login": "docker login ghcr.io -u bob -p «{a16}»",
    "kubectl_literals": "kubectl create secret generic db \\\n --from-literal=user=bob --from-literal=x='«{a16}»'",
    "htpasswd": "htpasswd -bc users bob «{a12}»",
    "curl_user": "curl -u admin:«{a12}» https://x.org/api",
    "option": "deploy --api-key «{a32}» --verbose",
    "sql": "CREATE USER app WITH PASSWORD '«{a10}»';",
    "userinfo": "postgres://app:«{a14}»@db.x.org:5432/x",
    "userinfo_without_user": "redis://:«{a14}»@cache:6379/0",
    "token_as_user": "git clone https://«{a40}»@github.com/x/y",
    "query": "GET /v1/files?limit=3&access_token=«{a32}»&page=2",
    "pgpass": "db.x.org:5432:shop:app:«{a12}»",
    "told": "The password for the admin is «{a12}», keep it.",
    "python": 'client = Client(api_key="«{a32}»", timeout=3)',
    "django": "SECRET_KEY = '«{a20}$x!@{a20}»'",
    "claude_access": '{"claudeAiOauth": {"accessToken": "«sk-ant-oat01-{a93}AA»"}}',
    "claude_refresh": "seen «sk-ant-ort01-{a93}AA» there",
    "codex_refresh": "it is «rt_{a86}» now",
    "langfuse": "x «sk-lf-{x8}-{x4}-{x4}-{x4}-{x12}» y",
    "google_oauth": "got «ya29.a0{a160}»",
    "telegram_url": "GET https://api.telegram.org/bot«{d10}:AAG{a32}»/getMe",
    "tavily": "use «tvly-{a32}» here",
    "e2b": "use «e2b_{x40}» here",
    "notion": "use «ntn_{d11}{a35}» here",
    "firecrawl": "use «fc-{x32}» here",
    "discord": "run with «MT{a24}.{a6}.{a38}» as the bot",
    "twilio": "use «SK{x32}» here",
    "jwt": "t «eyJ{a30}.eyJ{a60}.{a43}» t",
    "cut_key": "$ head -4 key\n-----BEGIN RSA PRIVATE KEY-----\n«{a64}»\n«{a64}»\n«{a64}»\n",
    "end_of_key": "$ tail -3 key\n«{a64}»\n«{a64}»\n«{a30}==»\n-----END PRIVATE KEY-----\n",
    "base64_of_env": "echo «{B40}» | base64 -d",
    "escaped": '{"a": "{\\"password\\": \\"«{a12}»\\"}"}',
    "webhook": "POST https://hooks.slack.com/services/«T{d8}/B{d8}/{a24}»",
    "shadow": "root:«$6${a16}${a86}»:19000:0:99999:7:::",
}
LATER = {
    "rails": 'production:\n  adapter: postgresql\n  password: "«{a16}»"\n',
    "header_list": '[{"key": "Authorization", "value": "Bearer «{a44}»"}]',
    "cloudflare": "export CLOUDFLARE_API_TOKEN=«{a40}»",
    "remote": "origin\thttps://oauth2:«{a20}»@gitlab.x.org/a/b.git (fetch)",
    "kubernetes_secret": "apiVersion: v1\ndata:\n  password: «{b12}»\nkind: Secret\n",
    "service_account": '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----'
    '\\n«{a64}»\\n«{a64}»\\n«{a32}»\\n-----END PRIVATE KEY-----\\n"}',
    "tfvars": 'db_admin_password = "«{a18}»"\nregion = "eu-west-1"\n',
    "ansible": "ansible-playbook site.yml -e ansible_become_pass=«{a12}» -v",
    "redis_env": "REDISCLI_AUTH=«{a20}» redis-cli -h cache ping",
    "sentry": "SENTRY_DSN=https://«{x32}»@o{d6}.ingest.sentry.io/{d7}",
    "stripe": "Stripe.api_key is «rk_live_{a24}»",
    "heroku": "HEROKU_API_KEY=«{x8}-{x4}-{x4}-{x4}-{x12}»",
    "openstack": "< X-Auth-Token: «gAAAAAB{a170}»",
    "java": "java -Djavax.net.ssl.keyStorePassword=«{a12}» -jar app.jar",
    "php": "define('DB_PASSWORD', '«{a14}»');",
    "go": 'cfg := Config{User: "app", Password: "«{a12}»", Port: 5432}',
    "presigned": "https://b.s3.amazonaws.com/k?X-Amz-Date=20260101T000000Z&X-Amz-Signature=«{x64}»",
    "azure_sas": "https://x.blob.core.windows.net/c?sv=2022-11-02&sp=r&sig=«{a43}%3D»",
    "proxy": "http_proxy=http://dev:«{a12}»@proxy.x.org:8080",
    "minio": "mc alias set local http://127.0.0.1:9000 admin «{a20}»",
}

# `docs/guides/redact.md` lists these.
NOT_FOUND = {
    "word": "config:\n  password: «{l14}»\n",
    "half": "second half: «{a20}»",
    "bare": "«{x40}»",
    "middle_of_key": "$ sed -n 5,6p key\n«{a64}»\n{a64}\n",
    "spaces": 'password: "«correct horse {l6} staple»"',
}

TRAPS = [
    "Run vault login before you call wandb login or snyk auth: ngrok authtoken is stored once.",
    "mc alias set ALIAS URL ACCESS_KEY SECRET_KEY\nmc alias set store https://s3.x.org $AK $SK",
    "mc alias ls; git config credential.helper store; npm config set cache /tmp/npm-cache",
    "aws configure set aws_secret_access_key <value>; aws configure set region eu-west-1",
    "git config --global user.name Bob; npm config get //npm.x.org/:_authToken",
    "kubectl create configmap x --from-literal=LOG_LEVEL=verbose7 --from-literal=mode=r2d2c3po",
    "kubectl create secret generic x --from-literal=password=$PASSWORD --from-literal=a=<value>",
    'cat <<< $TOKEN; gh auth login --with-token <<< "$GH_TOKEN"; docker login <<<${PW}',
    "s3cmd --access_key=$AK --secret_key=$SK; rclone config create store s3 secret_access_key $SK",
    "password: str = Field(..., description='The password')",
    "def login(user: str, password: str) -> Token:",
    "password = os.environ['DB_PASSWORD']",
    'api_key = os.getenv("OPENAI_API_KEY", "")',
    "PASSWORD=$DB_PASSWORD\nTOKEN=${GITHUB_TOKEN}",
    "export API_KEY=<your-api-key>",
    "API_KEY=your_api_key_here",
    "SECRET_KEY=changeme",
    "password: <password>",
    "postgres://user:${PASSWORD}@host/db and postgres://user:password@host/db",
    "Authorization: Bearer $TOKEN and Authorization: Basic <base64>",
    '{"token": " the", "logprob": -0.1}, {"token": "Assistant"}',
    '{"max_tokens": 4096, "prompt_tokens": 12, "token_ids": [1, 2]}',
    '{"eos_token": "<|endoftext|>", "pad_token": "[PAD]", "bos_token": "<s>"}',
    '{"next_page_token": "CAUQAA4f83aGh0ks93jH", "pageToken": "Cg0KC2ZpbGVfbmFtZTE2"}',
    '{"sessionId": "6bf46c69-7d2c-4f82-aeea-cbe226e87555", "id": "call_Ab3dE5gH7jK9mN1pQ3rS5tU7"}',
    '{"id": "toolu_01A09q90qw90lq917835lq9", "parent": "msg_01XFDUDYJgAACzvnptvVoYEL"}',
    "password=password, secret=self.secret, token=request.token",
    "const token = await getToken(user)\npassword: passwordInput.value,",
    '{"type": "object", "required": ["password"], "properties": {"password": {"type": "string"}}}',
    '"password": "Passwort", "forgot_password": "Forgot?", "token": "Token"',
    "The password is required and the token was invalid.",
    "$ mysql -u root -p\nEnter password: ",
    "mysql -u root -p$MYSQL_PASSWORD shop",
    "PWD=/home/dev/shop\nOLDPWD=/home/dev",
    "SSH_KEY=/home/dev/.ssh/id_ed25519\nTOKEN_FILE=/run/secrets/token",
    "commit 3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    '"integrity": "sha512-u9r3uZC0bdpGOXtlxUIdwf9pkmvhqJdrVCH9fapQtgy/OeTTMZ1nqH7agtvEfmGui6e1XxDa"',
    "https://x.org/a/b?page=2&key=name&sort=asc",
    "-----BEGIN PUBLIC KEY-----\nMFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBALRiMLAh9iimur8VA7qVvdqxevEuUkW4\n",
    "sk-learn-contrib-hdbscan-and-some-other-long-name",
    "adduser --disabled-password --gecos '' dev",
    "token: ${{ secrets.GITHUB_TOKEN }}",
    "password: {{ db_password }}",
    "the secret to good tests is to name them",
    "Cookie: <cookies>; Set-Cookie: theme=dark; Path=/",
    "AWS_SECRET_ACCESS_KEY=****************",
    "import secrets\nkey = secrets.token_hex(32)",
]


def drawn(text, seed=0):
    """Draw what a text leaves open; return it, and the secrets that « and » enclose."""
    draw = random.Random(f"{seed} {text}")

    def chosen(match):
        name, number = match[1], int(match[2])
        if name in BASE64:
            plain = BASE64[name] + "".join(draw.choices(ALNUM, k=number))
            return base64.b64encode(plain.encode()).decode()
        return "".join(draw.choices(CHARACTERS[name], k=number))

    text = re.sub(r"\{([a-zB])(\d+)\}", chosen, text)
    return re.sub("[«»]", "", text), re.findall("«(.*?)»", text)
