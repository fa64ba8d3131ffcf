// An extension of Pi: asks before a tool is run, and takes the MCP servers and the instructions of a session.
//
// Pi runs tools without asking. With this it asks its client for every call that is more than looking, and says which
// call that is, so that the question and the call are one to whoever reads them. acp.mjs gives it the rest.

import type { ExtensionAPI } from "@earendil-works/pi-coding-agent";

const VARIABLE = "HEARTH_PI_SESSION";
// They look at files, or lead to calls that are asked about one by one.
const QUIET = new Set(["read", "grep", "find", "ls", "codemode", "tool_search"]);
const KINDS: Record<string, string> = { bash: "execute", powershell: "execute", edit: "edit", write: "edit" };

type Pair = { name: string; value: string };
type Server = { name: string; command?: string; args?: string[]; env?: Pair[]; url?: string; headers?: Pair[] };

export default function (pi: ExtensionAPI) {
  const { servers, instructions } = session();
  for (const server of servers) {
    pi.registerMcpServer(server.name.replace(/[^A-Za-z0-9_-]/g, "_"), config(server));
  }
  if (instructions) {
    pi.on("before_agent_start", (event) => ({ systemPrompt: `${event.systemPrompt}\n\n${instructions}` }));
  }
  pi.on("tool_call", async (event, ctx) => {
    if (QUIET.has(event.toolName)) return undefined;
    const call = {
      toolCallId: event.toolCallId,
      title: event.toolName,
      kind: KINDS[event.toolName] ?? "other",
      rawInput: event.input,
    };
    const allowed = await ctx.ui.confirm(event.toolName, JSON.stringify({ "hearth.dev/tool_call": call }));
    return allowed ? undefined : { block: true, reason: "The user did not allow this call." };
  });
}

// What the session is opened with; taken out of the environment, which the commands of tools inherit.
function session(): { servers: Server[]; instructions: string } {
  const text = process.env[VARIABLE];
  delete process.env[VARIABLE];
  return text ? JSON.parse(text) : { servers: [], instructions: "" };
}

function config(server: Server) {
  // Their tools are listed to the model like any other, not left for it to search.
  const shared = { exposure: "direct" as const };
  if (server.command) {
    return { ...shared, command: server.command, args: server.args ?? [], env: plain(server.env) };
  }
  return { ...shared, url: server.url, headers: plain(server.headers) };
}

// Pi reads `$NAME` and a leading `!` as more than text.
function plain(pairs: Pair[] = []) {
  return Object.fromEntries(
    pairs.map(({ name, value }) => [name, value.replaceAll("$", "$$$$").replace(/^!/, "$$!")]),
  );
}
