// A line of the latest values of one number, on a canvas.

const MAX_VALUES = 120;

export class Sparkline {
  #canvas;
  #values = [];

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > MAX_VALUES) this.#values.shift();
    this.draw();
  }

  reset() {
    this.#values = [];
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    const top = Math.max(1, ...this.#values);
    const step = width / (MAX_VALUES - 1);
    const start = width - (this.#values.length - 1) * step;
    const y = (value) => height - 1.5 - (value / top) * (height - 3);
    context.beginPath();
    this.#values.forEach((value, place) => context.lineTo(start + place * step, y(value)));
    context.strokeStyle = getComputedStyle(this.#canvas).color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(start, height);
    context.globalAlpha = 0.15;
    context.fillStyle = context.strokeStyle;
    context.fill();
  }
}
