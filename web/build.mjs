// Bundles the playground into the package: users need no Node, the server serves these files from memory.
// Deterministic: the same sources and lock file give the same bytes, so a test can tell whether they are stale.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const out = "../src/keystroke/gateway/page";
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.ts" },
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  charset: "utf8",
  outdir: out,
});
await build({ entryPoints: ["static/app.css"], minify: true, outfile: `${out}/app.css` });
for (const name of ["index.html", "icon.svg"]) copyFileSync(`static/${name}`, `${out}/${name}`);

const hash = createHash("sha256");
for (const folder of ["src", "static"])
  for (const name of readdirSync(folder).sort()) hash.update(name).update(readFileSync(`${folder}/${name}`));
hash.update(readFileSync("package-lock.json"));
writeFileSync(`${out}/sources.sha256`, `${hash.digest("hex")}\n`);
for (const name of ["app.js", "app.css", "index.html"]) {
  const body = readFileSync(`${out}/${name}`);
  const kb = (n) => (n / 1024).toFixed(1).padStart(7);
  console.log(`${name.padEnd(12)} ${kb(body.length)} kB, ${kb(gzipSync(body).length)} kB packed`);
}
