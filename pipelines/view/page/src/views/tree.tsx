/** View 4: the prefix tree of a trajectory or a group, as an icicle. */

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { go } from "../address";
import { type Tree, tree, type TreeNode } from "../answers";
import { aroundZero, css, inkOn } from "../colours";
import { NoTrajectory } from "../first_trajectory";
import { useKeys } from "../keys";
import { Awaited, cssVariable, Empty, Go, Legend, Num, surface, Text, useAnswer, useSize, useTheme } from "../parts";
import { useSession } from "../session";
import { count, plain, short } from "../text";

const LANE = 26;
const TALLEST = 46;
const AXIS = 22;
const LISTED = 300;

export function TreeView(): JSX.Element {
  const { dataset, place, joined } = useSession();
  const ofTask = place.of !== "trajectory";
  const named = ofTask ? place.task : place.trajectory;
  const of = ofTask ? { instance_id: place.task } : { trajectory_id: place.trajectory };
  const key = dataset === null || named === undefined ? null : JSON.stringify([dataset.id, of, joined]);
  const answer = useAnswer(key, () => tree(dataset!.id, of, joined));
  useKeys("Tree", [
    { key: "t", does: "switch between the trees of the task and the trajectory", run: () => go({ of: ofTask ? "trajectory" : undefined }, { replace: true }) },
    { key: "x", does: "colour by return or by advantage", run: () => go({ color: place.color === "advantage" ? "return" : "advantage" }, { replace: true }) },
  ]);
  return (
    <section class="view tree-view" aria-labelledby="title">
      <header class="tools">
        <h1 id="title">
          Prefix tree {named !== undefined && <>of <Text value={named} /></>}
        </h1>
        <div class="group" role="group" aria-label="Of">
          <span class="hint" aria-hidden="true">of the</span>
          <button type="button" aria-pressed={ofTask} onClick={() => go({ of: undefined }, { replace: true })}>task</button>
          <button type="button" aria-pressed={!ofTask} onClick={() => go({ of: "trajectory" }, { replace: true })}>trajectory</button>
        </div>
        <div class="group" role="group" aria-label="Colour">
          <span class="hint" aria-hidden="true">colour</span>
          <button type="button" aria-pressed={place.color !== "advantage"} onClick={() => go({ color: undefined }, { replace: true })}>return</button>
          <button type="button" aria-pressed={place.color === "advantage"} onClick={() => go({ color: "advantage" }, { replace: true })}>advantage</button>
        </div>
      </header>
      {named === undefined ? (
        <NoTrajectory />
      ) : (
        <Awaited answer={answer}>
          {(found) => (found.nodes.length === 0 ? <Empty>No tokens.</Empty> : <Icicle key={key} tree={found} by={place.color === "advantage" ? "advantage" : "return"} />)}
        </Awaited>
      )}
    </section>
  );
}

interface Placed {
  node: TreeNode;
  /** Lanes from `lane` to `lane + lanes`. */
  lane: number;
  lanes: number;
  children: Placed[];
}

/** Each leaf has a lane; a node spans the lanes of its children. */
function placed(nodes: TreeNode[]): { all: Placed[]; lanes: number } {
  const byId = new Map(nodes.map((node) => [node.id, { node, lane: 0, lanes: 1, children: [] } as Placed]));
  const roots: Placed[] = [];
  for (const one of byId.values()) {
    const parent = one.node.parent === null ? undefined : byId.get(one.node.parent);
    (parent?.children ?? roots).push(one);
  }
  let lanes = 0;
  const all: Placed[] = [];
  const stack: { one: Placed; next: number }[] = [];
  for (const root of roots) {
    stack.push({ one: root, next: 0 });
    while (stack.length > 0) {
      const top = stack.at(-1)!;
      if (top.next === 0) {
        top.one.lane = lanes;
        all.push(top.one);
      }
      const child = top.one.children[top.next];
      if (child !== undefined) {
        top.next += 1;
        stack.push({ one: child, next: 0 });
        continue;
      }
      if (top.one.children.length === 0) lanes += 1;
      top.one.lanes = Math.max(1, lanes - top.one.lane);
      stack.pop();
    }
  }
  return { all, lanes };
}

function Icicle({ tree: { nodes, num_tokens: distinct }, by }: { tree: Tree; by: "return" | "advantage" }): JSX.Element {
  const theme = useTheme();
  const { place } = useSession();
  const { all, lanes } = useMemo(() => placed(nodes), [nodes]);
  const byId = useMemo(() => new Map(all.map((one) => [one.node.id, one])), [all]);
  // Space for the name beside the last leaf.
  const deepest = Math.ceil(1.18 * Math.max(1, ...nodes.map((node) => node.end)));
  const [range, setRange] = useState<[number, number]>([0, deepest]);
  const scale = useMemo(() => aroundZero(theme, nodes.map((node) => node[by])), [nodes, by, theme]);
  const known = nodes.some((node) => node[by] !== null);
  const [ref, size] = useSize();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const chosen = place.at === undefined ? null : Number(place.at);
  const choose = (id: number | undefined): void => {
    if (id !== undefined) go({ at: String(id) }, { replace: true });
  };
  const zoomTo = (low: number, high: number): void => {
    const width = Math.max(8, Math.min(deepest, high - low));
    const start = Math.max(0, Math.min(deepest - width, low));
    setRange([start, start + width]);
  };
  const zoom = (factor: number, middle = (range[0] + range[1]) / 2): void =>
    zoomTo(middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor);
  const current = chosen === null ? undefined : byId.get(chosen);
  const sibling = (by_: number): void => {
    if (current === undefined) return choose(all[0]?.node.id);
    const siblings = current.node.parent === null ? all.filter((one) => one.node.parent === null) : byId.get(current.node.parent)!.children;
    choose(siblings[siblings.indexOf(current) + by_]?.node.id);
  };
  const nextCause = (): void => {
    const causes = all.filter((one) => one.node.cause !== null);
    const at = causes.findIndex((one) => one.node.id === chosen);
    choose(causes[(at + 1) % (causes.length || 1)]?.node.id);
  };
  useKeys("Nodes", [
    { key: "ArrowRight", does: "first child", run: () => choose(current === undefined ? all[0]?.node.id : current.children[0]?.node.id) },
    { key: "ArrowLeft", does: "parent", run: () => choose(current?.node.parent ?? undefined) },
    { key: "ArrowDown", does: "next sibling", run: () => sibling(1) },
    { key: "ArrowUp", does: "previous sibling", run: () => sibling(-1) },
    { key: "d", does: "next broken prefix", run: nextCause },
    { key: "+", does: "zoom in", run: () => zoom(0.5, current === undefined ? undefined : (current.node.start + current.node.end) / 2) },
    { key: "-", does: "zoom out", run: () => zoom(2) },
    { key: "z", does: "zoom to the node", run: () => current !== undefined && zoomTo(current.node.start, current.node.end) },
    { key: "0", does: "zoom out to the entire tree", run: () => setRange([0, deepest]) },
    { key: "Enter", does: "open the node's tokens", run: () => current !== undefined && openNode(current.node) },
  ]);
  const lane = Math.max(6, Math.min(TALLEST, size.height > 0 ? (size.height - AXIS) / lanes : LANE));
  const height = lanes * lane + AXIS;
  const x = (depth: number): number => ((depth - range[0]) / (range[1] - range[0])) * size.width;

  useLayoutEffect(() => {
    if (canvas.current === null || size.width === 0) return;
    const context = surface(canvas.current, size.width, height);
    const [ink, line, page, accent, neutral, muted] = ["--ink", "--line", "--page", "--accent", "--faint", "--muted"].map(cssVariable) as [string, string, string, string, string, string];
    drawAxis(context, range, size.width, height, line, muted);
    context.textBaseline = "middle";
    for (const one of all) {
      const { node } = one;
      const [left, right] = [Math.max(-2, x(node.start)), Math.min(size.width + 2, x(node.end))];
      if (right < 0 || left > size.width) continue;
      const [top, tall, wide] = [one.lane * lane + AXIS, one.lanes * lane - 1, Math.max(1, right - left - 0.75)];
      const colour = scale.colour(node[by]);
      context.fillStyle = colour === null ? neutral : css(colour);
      context.globalAlpha = node.sampled ? 1 : 0.55;
      context.fillRect(left, top, wide, tall);
      context.globalAlpha = 1;
      if (!node.sampled) hatch(context, left, top, wide, tall, line);
      if (wide > 3) {
        context.strokeStyle = line;
        context.lineWidth = 1;
        context.strokeRect(left + 0.5, top + 0.5, wide - 1, tall - 1);
      }
      if (wide > 42 && tall > 11) {
        context.font = "12px system-ui, sans-serif";
        context.fillStyle = colour === null || !node.sampled ? ink : inkOn(colour);
        context.save();
        context.beginPath();
        context.rect(left, top, wide - 4, tall);
        context.clip();
        const start = Math.max(left, 0) + 5;
        context.fillText(fitted(context, plain(node.text, 160), left + wide - 5 - start), start, top + Math.min(tall / 2, 60));
        context.restore();
      }
      // Write the names of the rows that end in a leaf beside it, where no box can be.
      if (one.children.length === 0 && tall > 11 && right < size.width - 40) {
        context.font = "11px system-ui, sans-serif";
        context.fillStyle = muted;
        context.fillText(fitted(context, endsOf(node), size.width - right - 8), right + 6, top + Math.min(tall / 2, 60));
      }
      if (node.cause !== null) drawCause(context, left, top, tall, page, ink);
      if (node.id === chosen || node.id === hovered) {
        context.strokeStyle = accent;
        context.lineWidth = node.id === chosen ? 2.5 : 1.25;
        context.strokeRect(left + 1, top + 1, Math.max(2, wide - 2), tall - 2);
      }
    }
  }, [all, size.width, height, range, scale, chosen, hovered, by, theme, lane]);

  const under = (event: MouseEvent): number | null => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const depth = range[0] + ((event.clientX - box.left) / (size.width || 1)) * (range[1] - range[0]);
    const at = (event.clientY - box.top - AXIS) / lane;
    return all.find((one) => depth >= one.node.start && depth < one.node.end && at >= one.lane && at < one.lane + one.lanes)?.node.id ?? null;
  };
  useEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const onWheel = (event: WheelEvent): void => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const box = element.getBoundingClientRect();
      const middle = range[0] + ((event.clientX - box.left) / (size.width || 1)) * (range[1] - range[0]);
      zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, middle);
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  });
  const shown = byId.get(hovered ?? chosen ?? Number.NaN)?.node ?? null;
  const causes = nodes.filter((node) => node.cause !== null).length;
  const rows = new Set(nodes.flatMap((node) => node.rows.map(String))).size;
  return (
    <>
      <div class="tools">
        <p class="lead">
          <Num value={distinct} name="num_tokens" /> distinct tokens in {count(nodes.length, "node")}, {count(rows, "row")}
          {causes > 0 ? `; ${count(causes, "broken prefix", "broken prefixes")} (▲)` : "; no broken prefixes"}.
        </p>
        <div class="group" role="group" aria-label="Zoom">
          <span class="hint" aria-hidden="true">zoom</span>
          <button type="button" onClick={() => zoom(0.5)} aria-label="Zoom in">+</button>
          <button type="button" onClick={() => zoom(2)} aria-label="Zoom out">−</button>
          <button type="button" onClick={() => setRange([0, deepest])}>all</button>
        </div>
        {known ? <Legend scale={scale} title={by} /> : <p class="note">No known {by}s{by === "advantage" && "; select an update that recorded these tokens"}.</p>}
        <p class="note marks-line"><span class="box sampled" /> sampled <span class="box prompt" /> prompt <span>▲ broken prefix</span></p>
      </div>
      <div class="stage">
        <div class="icicle scroller" ref={ref} tabIndex={0} role="application" aria-label="Prefix tree: arrow keys move between nodes; the table below lists them">
          <canvas
            ref={canvas}
            aria-hidden="true"
            onMouseMove={(event) => setHovered(under(event))}
            onMouseLeave={() => setHovered(null)}
            onClick={(event) => choose(under(event) ?? undefined)}
            onDblClick={(event) => {
              const node = byId.get(under(event) ?? Number.NaN)?.node;
              if (node !== undefined) zoomTo(node.start, node.end);
            }}
          />
        </div>
        <NodeDetails node={shown} />
      </div>
      <details>
        <summary>Nodes as a table</summary>
        <table class="plain" aria-label="Nodes">
          <thead>
            <tr>
              <th scope="col" class="numeric">node</th><th scope="col" class="numeric">parent</th>
              <th scope="col" class="numeric">from token</th><th scope="col" class="numeric">to token</th>
              <th scope="col" class="numeric">trajectories</th><th scope="col" class="numeric">return</th>
              <th scope="col" class="numeric">advantage</th><th scope="col">broken by</th>
            </tr>
          </thead>
          <tbody>
            {nodes.slice(0, LISTED).map((node) => (
              <tr key={node.id} data-row={node.id} class={node.id === chosen ? "chosen" : ""}>
                <td class="numeric"><button type="button" class="link" onClick={() => choose(node.id)}>{node.id}</button></td>
                <td class="numeric"><Num value={node.parent} name="parent" /></td>
                <td class="numeric"><Num value={node.start} name="start" /></td>
                <td class="numeric"><Num value={node.end} name="end" /></td>
                <td class="numeric"><Num value={node.num_trajectories} name="num_trajectories" /></td>
                <td class="numeric"><Num value={node.return} name="return" /></td>
                <td class="numeric"><Num value={node.advantage} name="advantage" /></td>
                <td>{node.cause === null ? "" : <Text value={node.cause} />}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {nodes.length > LISTED && <p class="note">The first {LISTED} of {short(nodes.length)} nodes.</p>}
      </details>
    </>
  );
}

/** Label of a leaf: the trajectory that ends in it, with its step and return, or the number of trajectories. */
function endsOf(node: TreeNode): string {
  const names = [...new Set(node.rows.map(([trajectory]) => trajectory))];
  if (names.length !== 1) return count(names.length, "trajectory", "trajectories");
  const steps = node.rows.length === 1 ? `step ${node.rows[0]![1]}` : count(node.rows.length, "step");
  return `${plain(names[0]!, 40)}, ${steps}${node.return === null ? "" : `, return ${short(node.return)}`}`;
}

function openNode(node: TreeNode): void {
  const row = node.rows[0];
  if (row !== undefined) go({ view: "tokens", trajectory: row[0], step: String(row[1]), at: String(node.start) });
}

function NodeDetails({ node }: { node: TreeNode | null }): JSX.Element {
  if (node === null) {
    return (
      <aside class="details" aria-label="Node">
        <h2>Node</h2>
        <p class="note">Each box is a run of tokens shared by the rows to its right; its width is the number of tokens. Click a box, or press an arrow key.</p>
      </aside>
    );
  }
  return (
    <aside class="details" aria-label="Node" aria-live="polite" data-node={node.id}>
      <h2>Node <Num value={node.id} name="id" /><small>{node.sampled ? "sampled" : "prompt"}</small></h2>
      {node.cause !== null && <p class="cause">▲ Broken prefix: <Text value={node.cause} /></p>}
      <table class="facts">
        <tbody>
          <tr><th scope="row">tokens</th><td class="numeric"><Num value={node.end - node.start} name="tokens" /></td></tr>
          <tr><th scope="row">from, to</th><td class="numeric"><Num value={node.start} name="start" />, <Num value={node.end} name="end" /></td></tr>
          <tr><th scope="row">trajectories</th><td class="numeric"><Num value={node.num_trajectories} name="num_trajectories" /></td></tr>
          <tr><th scope="row">mean return</th><td class="numeric"><Num value={node.return} name="return" /></td></tr>
          <tr><th scope="row">mean advantage</th><td class="numeric"><Num value={node.advantage} name="advantage" /></td></tr>
        </tbody>
      </table>
      <div class="glyph long"><Text value={node.text} /></div>
      <h3>Rows</h3>
      <ul class="rows">
        {node.rows.slice(0, 12).map(([trajectory, step]) => (
          <li key={`${trajectory} ${step}`}>
            <Go to={{ view: "tokens", trajectory, step: String(step), at: String(node.start) }}>
              <Text value={trajectory} />, step {step}
            </Go>
          </li>
        ))}
        {node.rows.length > 12 && <li class="none">and {short(node.rows.length - 12)} more</li>}
      </ul>
    </aside>
  );
}

function drawAxis(context: CanvasRenderingContext2D, range: [number, number], width: number, height: number, line: string, muted: string): void {
  const rough = ((range[1] - range[0]) / Math.max(2, width / 110));
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) ?? power * 10);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  for (let depth = Math.ceil(range[0] / step) * step; depth <= range[1]; depth += step) {
    const x = ((depth - range[0]) / (range[1] - range[0])) * width;
    context.fillStyle = line;
    context.fillRect(x, AXIS - 6, 1, height);
    context.fillStyle = muted;
    if (x < width - 30) context.fillText(depth === 0 ? "0 tokens" : short(depth), x + 3, 3);
  }
}

/** Truncate a text to a width in pixels. */
function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let [fits, cut] = [0, text.length];
  while (cut - fits > 1) {
    const middle = (fits + cut) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) fits = middle;
    else cut = middle;
  }
  return fits === 0 ? "" : `${text.slice(0, fits)}…`;
}

function hatch(context: CanvasRenderingContext2D, left: number, top: number, width: number, height: number, colour: string): void {
  if (width < 4) return;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = Math.floor((left - height) / 8) * 8; x < left + width; x += 8) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
}

function drawCause(context: CanvasRenderingContext2D, left: number, top: number, height: number, page: string, ink: string): void {
  const middle = top + Math.min(height / 2, 30);
  context.beginPath();
  context.moveTo(left, middle - 6);
  context.lineTo(left + 6, middle + 5);
  context.lineTo(left - 6, middle + 5);
  context.closePath();
  context.fillStyle = ink;
  context.strokeStyle = page;
  context.lineWidth = 2;
  context.stroke();
  context.fill();
}
