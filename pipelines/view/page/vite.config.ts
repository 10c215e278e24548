import { defineConfig } from "vite";

// `make view` writes the page to pipelines/view/bundle/, which is committed so that users need no node.
// Names have no hash, so that a change of the page is a change of the same files.
export default defineConfig({
  base: "./",
  build: {
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
