// Everyone is in one room; whatever one publishes, all the others get. Prints its address.
const { createServer } = require('node:http');
const { Server } = require('socket.io');
const http = createServer();
// Pings would only disturb the measurement.
const io = new Server(http, { transports: ['websocket'], pingInterval: 3600000, pingTimeout: 3600000 });
io.on('connection', (socket) => {
  socket.join('load');
  socket.on('publish', (event) => socket.to('load').emit('message', event));
});
http.listen(0, '127.0.0.1', () => console.log(`127.0.0.1:${http.address().port}`));
