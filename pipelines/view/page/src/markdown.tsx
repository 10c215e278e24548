/** Markdown as elements. Text of a dataset is never HTML: markup, links and pictures stay visible as text. */

import { marked, type Token, type Tokens } from "marked";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { Text } from "./parts";

const LONGEST = 100_000;

/** Text as Markdown; text that is too long, or nested too deeply, as it is. */
export function Markdown({ value }: { value: string }): JSX.Element {
  const tokens = useMemo(() => parsed(value), [value]);
  return tokens === null ? <Text value={value} /> : <div class="markdown"><Blocks tokens={tokens} /></div>;
}

function parsed(text: string): Token[] | null {
  if (text.length > LONGEST) return null;
  try {
    return marked.lexer(text);
  } catch {
    return null;
  }
}

function Blocks({ tokens }: { tokens: Token[] }): JSX.Element {
  return <>{tokens.map((token, at) => <Block key={at} token={token} />)}</>;
}

function Block({ token }: { token: Token }): JSX.Element | null {
  switch (token.type) {
    case "space":
      return null;
    case "code":
      return <Fence {...(token as Tokens.Code)} />;
    case "heading":
      return <p class={`heading depth-${(token as Tokens.Heading).depth}`}><Inline tokens={token.tokens ?? []} /></p>;
    case "paragraph":
      return <p><Inline tokens={token.tokens ?? []} /></p>;
    case "blockquote":
      return <blockquote><Blocks tokens={token.tokens ?? []} /></blockquote>;
    case "checkbox":
      return <input type="checkbox" disabled checked={(token as Tokens.Checkbox).checked} />;
    case "hr":
      return <hr />;
    case "list":
      return <List {...(token as Tokens.List)} />;
    case "table":
      return <Grid {...(token as Tokens.Table)} />;
    case "text":
      return token.tokens === undefined ? <Text value={token.raw} /> : <Inline tokens={token.tokens} />;
    default: // HTML, definitions of links
      return <p><Text value={token.raw} /></p>;
  }
}

function Fence({ lang, text }: { lang?: string | undefined; text: string }): JSX.Element {
  return (
    <figure class="fence">
      {lang !== undefined && lang !== "" && <figcaption><Text value={lang} /></figcaption>}
      <pre><Text value={text} /></pre>
    </figure>
  );
}

function List({ ordered, start, items }: Tokens.List): JSX.Element {
  const lines = items.map((item, at) => (
    <li key={at}>
      <Blocks tokens={item.tokens} />
    </li>
  ));
  return ordered ? <ol start={Number(start) || 1}>{lines}</ol> : <ul>{lines}</ul>;
}

function Grid({ header, rows }: Tokens.Table): JSX.Element {
  return (
    <table class="plain">
      <thead><tr>{header.map((cell, at) => <th key={at}><Inline tokens={cell.tokens} /></th>)}</tr></thead>
      <tbody>
        {rows.map((row, at) => (
          <tr key={at}>{row.map((cell, column) => <td key={column}><Inline tokens={cell.tokens} /></td>)}</tr>
        ))}
      </tbody>
    </table>
  );
}

function Inline({ tokens }: { tokens: Token[] }): JSX.Element {
  return (
    <>
      {tokens.map((token, at) => {
        const inner = <Inline tokens={token.type !== "image" && "tokens" in token ? (token.tokens ?? []) : []} />;
        if (token.type === "strong") return <strong key={at}>{inner}</strong>;
        if (token.type === "em") return <em key={at}>{inner}</em>;
        if (token.type === "del") return <del key={at}>{inner}</del>;
        if (token.type === "br") return <br key={at} />;
        if (token.type === "codespan") return <code key={at}><Text value={(token as Tokens.Codespan).text} /></code>;
        if (token.type === "escape") return <Text key={at} value={(token as Tokens.Escape).text} />;
        // What a link or a picture points to must be seen, so both stay as they were written.
        return <Text key={at} value={token.raw} />;
      })}
    </>
  );
}
