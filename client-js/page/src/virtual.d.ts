/** The module that `page/emoji-data.ts` makes. */
declare module 'virtual:emoji' {
  const groups: import('./emoji-data.js').EmojiGroup[];
  export default groups;
}
