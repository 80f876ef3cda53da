// A page as a function of its data: `h` describes elements, `patch` updates the document.
// Text goes in as text nodes only, so names from a fleet or a client cannot be markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "circle", "g", "polyline"]);

/**
 * One element. Props: `key` (its identity among its siblings), `class`, `style` (CSS properties),
 * `on` (handlers by event), `hook` (called once with the new element, which then owns its
 * children; the function that it returns is called when the element is removed); all others are attributes, left out when
 * null or false.
 */
export function h(tag, props = {}, ...kids) {
  return { tag, props, kids: kids.flat(Infinity).filter((kid) => kid !== null && kid !== false && kid !== undefined && kid !== "") };
}

/** Make the children of `parent` match `wanted`, and change only the differences. */
export function patch(parent, wanted) {
  const kept = new Map();
  for (const node of parent.childNodes) if (node.vkey !== undefined) kept.set(node.vkey, node);
  let at = parent.firstChild;
  for (const want of wanted) {
    let node = reusable(want, at, kept);
    if (node === null) node = created(want);
    if (node !== at) parent.insertBefore(node, at);
    else at = at.nextSibling;
    node.vkey = want.props?.key ?? undefined;
    update(node, want);
  }
  while (at !== null) {
    const next = at.nextSibling;
    end(at);
    at.remove();
    at = next;
  }
}

/** Call the cleanup of each hook of a removed node and of its children. */
function end(node) {
  node.onRemove?.();
  for (const kid of node.childNodes) end(kid);
}

function reusable(want, at, kept) {
  if (typeof want !== "object") return at?.nodeType === Node.TEXT_NODE ? at : null;
  const key = want.props.key;
  const found = key === undefined ? at : kept.get(key);
  if (!found || found.nodeType !== Node.ELEMENT_NODE) return null;
  if (key === undefined && found.vkey !== undefined) return null;
  return found.localName === want.tag ? found : null;
}

function created(want) {
  if (typeof want !== "object") return document.createTextNode("");
  const node = SVG_TAGS.has(want.tag) ? document.createElementNS(SVG, want.tag) : document.createElement(want.tag);
  if (want.props.hook) node.onRemove = want.props.hook(node);
  return node;
}

function update(node, want) {
  if (typeof want !== "object") {
    const text = String(want);
    if (node.data !== text) node.data = text;
    return;
  }
  const { key, class: names, style, on, hook, ...attributes } = want.props;
  setAttributes(node, names ? { ...attributes, class: names } : attributes);
  setStyle(node, style ?? {});
  setHandlers(node, on ?? {});
  if (!hook) patch(node, want.kids);
}

function setAttributes(node, wanted) {
  const had = node.vattributes ?? {};
  for (const name of Object.keys(had)) if (!(name in wanted)) node.removeAttribute(name);
  for (const [name, value] of Object.entries(wanted)) {
    if (had[name] === value) continue;
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.vattributes = wanted;
}

function setStyle(node, wanted) {
  const had = node.vstyle ?? {};
  for (const name of Object.keys(had)) if (!(name in wanted)) node.style.removeProperty(name);
  for (const [name, value] of Object.entries(wanted)) if (had[name] !== value) node.style.setProperty(name, value);
  node.vstyle = wanted;
}

function setHandlers(node, wanted) {
  const had = node.vhandlers ?? {};
  for (const name of Object.keys(had)) if (!(name in wanted)) node[`on${name}`] = null;
  for (const [name, handler] of Object.entries(wanted)) node[`on${name}`] = handler;
  node.vhandlers = wanted;
}
