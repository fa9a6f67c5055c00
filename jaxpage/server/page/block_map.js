// The pool as a map: a square for each block, or for a few neighbours where there are too many, on a canvas.

const STATES = ["free", "cached", "used", "shared", "scratch"];
const STATE_OF_LETTER = { ".": "free", c: "cached", u: "used", s: "shared", x: "scratch" };
const MAX_SIDE = 14;
const MIN_SIDE = 3;
const MAX_HEIGHT = 240;

export class BlockMap {
  #canvas;
  #note;
  #map = null;
  #blockSize = 0;
  #requests = [];
  #highlighted = null;
  #pointed = null;
  #layout = null;
  #colors = {};

  /** `note` is the line that tells what is pointed at. */
  constructor(canvas, note) {
    this.#canvas = canvas;
    this.#note = note;
    this.#readColors();
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => (this.#readColors(), this.#draw()));
    }
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => ((this.#pointed = null), this.#draw()));
  }

  /** Shows a picture's map (unchanged if `map` is undefined) and whose the blocks are. */
  update(map, blockSize, requests) {
    if (map) this.#map = map;
    this.#blockSize = blockSize;
    this.#requests = requests;
    this.#draw();
  }

  /** Outlines the blocks of the request with this id; null for none. */
  highlight(id) {
    this.#highlighted = id;
    this.#draw();
  }

  #readColors() {
    const style = getComputedStyle(document.documentElement);
    for (const name of [...STATES, "outline"]) this.#colors[name] = style.getPropertyValue(`--block-${name}`).trim();
  }

  #draw() {
    const width = this.#canvas.parentElement.clientWidth;
    if (!this.#map || !width) return;
    this.#layout = layoutOf(this.#map, this.#canvas.clientWidth || width);
    const { side, columns, rows, gap, numCells } = this.#layout;
    const scale = window.devicePixelRatio || 1;
    this.#canvas.style.height = `${rows * side}px`;
    this.#canvas.width = Math.round(this.#canvas.clientWidth * scale);
    this.#canvas.height = Math.round(rows * side * scale);
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    const ink = side - gap;
    const place = (cell) => [(cell % columns) * side, Math.floor(cell / columns) * side];
    for (let cell = 0; cell < numCells; cell++) {
      const [x, y] = place(cell);
      let top = y;
      for (const [state, share] of this.#sharesOf(cell)) {
        context.fillStyle = this.#colors[state];
        context.fillRect(x, top, ink, share * ink);
        top += share * ink;
      }
    }
    this.#outline(context, place, ink);
    this.#writeNote();
  }

  #outline(context, place, ink) {
    const request = this.#requests.find((each) => each.id === this.#highlighted);
    const size = this.#map.blocks_per_cell;
    const cells = new Set(request ? blocksOf(request).map((block) => Math.floor(block / size)) : []);
    if (this.#pointed !== null) cells.add(this.#pointed);
    context.strokeStyle = this.#colors.outline;
    context.lineWidth = ink < 6 ? 1 : 2;
    const inset = context.lineWidth / 2;
    for (const cell of cells) {
      const [x, y] = place(cell);
      context.strokeRect(x + inset, y + inset, ink - 2 * inset, ink - 2 * inset);
    }
  }

  /** [state, share of the cell] for each state in it. */
  #sharesOf(cell) {
    const map = this.#map;
    if (map.blocks_per_cell === 1) return [[STATE_OF_LETTER[map.states[cell]], 1]];
    return Object.entries(this.#countsOf(cell)).map(([state, count]) => [state, count / map.blocks_per_cell]);
  }

  #countsOf(cell) {
    const { shared, used, cached, blocks_per_cell: size, num_blocks: total } = this.#map;
    const counts = { shared: shared[cell], used: used[cell], cached: cached[cell] };
    const held = counts.shared + counts.used + counts.cached;
    return { ...counts, free: Math.min(size, total - cell * size) - held - (cell === 0 ? 1 : 0) };
  }

  #point(event) {
    if (!this.#layout) return;
    const { side, columns, numCells } = this.#layout;
    const box = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / side);
    const cell = Math.floor((event.clientY - box.top) / side) * columns + column;
    this.#pointed = column >= 0 && column < columns && cell >= 0 && cell < numCells ? cell : null;
    this.#draw();
  }

  #writeNote() {
    const size = this.#map.blocks_per_cell;
    const cell = this.#pointed;
    let text = `A square is ${size === 1 ? "a block" : `${size} blocks`} of ${this.#blockSize} tokens.`;
    if (cell !== null && size === 1) {
      const state = STATE_OF_LETTER[this.#map.states[cell]];
      const holders = this.#requests.filter((each) => blocksOf(each).includes(cell)).map((each) => each.id);
      text = `Block ${cell}: ${state}${holders.length ? ` by ${holders.join(", ")}` : ""}`;
      if (state === "scratch") text += ", padding is written here";
    } else if (cell !== null) {
      const last = Math.min((cell + 1) * size, this.#map.num_blocks) - 1;
      const counts = Object.entries(this.#countsOf(cell)).filter(([, count]) => count);
      text = `Blocks ${cell * size} to ${last}: ${counts.map(([state, count]) => `${count} ${state}`).join(", ")}`;
    }
    if (this.#note.textContent !== text) this.#note.textContent = text;
  }
}

/** The largest squares with which the whole pool fits. */
function layoutOf(map, width) {
  const numCells = Math.ceil(map.num_blocks / map.blocks_per_cell);
  let side = MAX_SIDE;
  while (side > MIN_SIDE && Math.ceil(numCells / Math.floor(width / side)) * side > MAX_HEIGHT) side--;
  const columns = Math.max(1, Math.floor(width / side));
  return { side, columns, rows: Math.ceil(numCells / columns), gap: side > 4 ? 1 : 0.5, numCells };
}

function blocksOf(request) {
  return request.blocks.flatMap(([first, count]) => Array.from({ length: count }, (_, place) => first + place));
}
