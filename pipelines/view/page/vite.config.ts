import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

// `vite build` writes the page that the server serves, `vite build --mode report` the template of the
// one-file export: script and style inline, allowed by hash, and a place for the answers.
const OUT = fileURLToPath(new URL("../bundle", import.meta.url));

function hash(text: string): string {
  return `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
}

function oneFile(): Plugin {
  return {
    name: "one-file",
    enforce: "post",
    generateBundle(_options, bundle) {
      let script = "";
      let style = "";
      for (const [name, file] of Object.entries(bundle)) {
        if (file.type === "chunk") script += file.code;
        else if (name.endsWith(".css")) style += file.source.toString();
        if (!name.endsWith(".html") && !name.endsWith(".md")) delete bundle[name];
      }
      script = script.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
      const policy = [
        "default-src 'none'",
        `script-src ${hash(script)}`,
        `style-src ${hash(style)}`,
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
      ].join("; ");
      const page = bundle["index.html"];
      if (page?.type !== "asset") throw new Error("no index.html in the bundle");
      page.fileName = "report.html";
      page.source = page.source
        .toString()
        .replace(/\s*<script type="module"[^>]*><\/script>/, "")
        .replace(/\s*<link rel="stylesheet"[^>]*>/, "")
        .replace(
          /<meta charset="utf-8" \/>/,
          (charset) => `${charset}\n    <meta http-equiv="Content-Security-Policy" content="${policy}" />`,
        )
        .replace("</head>", () => `<style>${style}</style>\n  </head>`)
        .replace(
          "</body>",
          () =>
            `<script id="answers" type="application/json">__ANSWERS__</script>\n` +
            `<script type="module">${script}</script>\n  </body>`,
        );
    },
  };
}

export default defineConfig(({ mode }) => ({
  base: "./",
  plugins: mode === "report" ? [oneFile()] : [],
  build: {
    outDir: OUT,
    emptyOutDir: mode !== "report",
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    license: mode === "report" ? false : { fileName: "licenses.md" },
    chunkSizeWarningLimit: 1000,
  },
}));
