import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

// The server serves the page as it is; a report inlines its script and style, whose names have no hash.
export default defineConfig({
  base: "./",
  build: {
    outDir: fileURLToPath(new URL("../bundle", import.meta.url)),
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    license: { fileName: "licenses.md" },
    chunkSizeWarningLimit: 1000,
    rolldownOptions: {
      output: { entryFileNames: "assets/[name].js", assetFileNames: "assets/[name][extname]" },
    },
  },
});
